# T2T-ViT-14 with Unified Normalization on CIFAR-10, from its ImageNet weights.
_base_ = ['./un_t2t_vit_14_cifar100.py']

model = dict(head=dict(num_classes=10))
data_preprocessor = dict(num_classes=10)
train_dataloader = dict(dataset=dict(type='CIFAR10', data_root='data/cifar10'))
val_dataloader = dict(dataset=dict(type='CIFAR10', data_root='data/cifar10'))
test_dataloader = val_dataloader
